"""Public checkpoint formats of learned proposers: one reader per format, and the detection of a checkpoint's format.

Every reader offers `read(config, target_config, shapes) -> Spec`, which needs no weights, and `load(spec, tensors)`,
which returns them under canonical names. Detection (`detect`, `peek`) and configuration (`values`) need no torch.
"""
