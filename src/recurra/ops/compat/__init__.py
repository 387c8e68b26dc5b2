"""The field's operators under their own names: a module for each project whose imports may be changed to ours.

>>> from recurra.ops.compat.mamba_ssm import mamba_chunk_scan_combined, selective_state_update
>>> from recurra.ops.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
>>> from recurra.ops.compat.vllm import causal_conv1d_fn, selective_scan_fn
>>> from recurra.ops.compat.fla import chunk_gated_delta_rule

Arguments keep those projects' names, order, shapes and meanings; the backend follows the tensors' device, and
float64 goes to the reference. What isn't served raises :class:`recurra.errors.RefusedArgumentError`, which names the
argument. There are no gradients: an input that requires one is refused while gradients are recorded.
Names that mean the same in all projects are in :mod:`recurra.ops` as well.
"""
