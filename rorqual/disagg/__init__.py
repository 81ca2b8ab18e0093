"""Disaggregated prefill: KV cache transfer between engines that prefill and engines that decode."""
