"""What `slipstream simulate` and `slipstream tune` say, against what is measured."""
