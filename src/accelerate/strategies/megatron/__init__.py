"""Training with Megatron-LM.

Source: https://github.com/NVIDIA/Megatron-LM (`megatron.core` and `megatron.training`)
"""
