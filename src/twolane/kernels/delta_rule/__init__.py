"""Linear attention: a short convolution, then the gated delta rule."""
