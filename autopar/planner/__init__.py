"""The planner: a captured program and a request come in, a Plan goes out; neither devices nor weights are needed."""
