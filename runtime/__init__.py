"""The runtime of generated models. Generated code imports `ops` from here and nothing else of ours."""
