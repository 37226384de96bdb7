"""Layers with recurrent state (gated delta net, Mamba, short convolution) beside attention layers."""
