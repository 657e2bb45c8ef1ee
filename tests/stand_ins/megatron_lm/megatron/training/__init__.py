"""Stand-in for `megatron.training`, which megatron-core 0.16 lacks: its public functions over the real core.

Only tests use it. `megatron` is a namespace package, so this folder and the installed `megatron.core` come
together. Each function takes and returns what NVIDIA's documents and scripts show of the one it replaces;
none of its text is NVIDIA's.
"""
