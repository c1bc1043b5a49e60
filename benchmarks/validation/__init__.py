"""How wrong the cost models are: published measurements predicted through autopar's own road, kind by kind."""
