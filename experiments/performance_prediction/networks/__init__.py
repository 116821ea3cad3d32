"""The eight convolutional networks that are profiled, as plain modules.

They are defined here, and not imported from torchvision, so that the same layers under the same names run on a machine
without torchvision: its published wheels need the CUDA build of one exact torch and, beside another, break the import
of transformers as well. Submodules are named and shaped as in torchvision, whose weights they load.
"""
