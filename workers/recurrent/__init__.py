"""Layers with recurrent state (gated delta net, Mamba-2, short convolution) beside attention layers."""
