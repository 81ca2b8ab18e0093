"""The op table of Ascend NPUs, through torch_npu's operators."""
