"""The Hugging Face side: quantizer, loader and callback. Importing it registers the quantizer."""

from poros_hf.hf.quantizer import register

register()
