"""What a copy of this package under another name has of its own. tools/hub_kernel.py writes this file anew in the
copies that it makes; two of them, and this package, can then be in one process."""

# Of the operators: torch.ops.<NAMESPACE>.
NAMESPACE = "flash_qla"

# Whether it offers itself to frameworks that look for the package flash_qla.
OFFERS_ITSELF = True
