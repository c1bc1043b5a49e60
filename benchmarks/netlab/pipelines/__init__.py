"""Does the pipeline that autopar picks win on a slow network, and by the factor that the simulator says?"""
