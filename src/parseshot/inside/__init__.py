"""Look inside a model: the paper's figures and some more, drawn from any DOP model and any packed data set."""
