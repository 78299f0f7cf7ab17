import logging

logger = logging.getLogger("flashinfer")
