"""The edge: models of other libraries as models of this one. Nothing inside imports it."""
