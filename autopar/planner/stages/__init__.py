"""The inter-operator search: which blocks form the stages of a pipeline, on which sub-meshes, under which schedule."""
