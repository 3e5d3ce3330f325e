"""Attention of whole models replaced in place, and put back again: ``adaattn.convert``."""

from adaattn.integrations.conversion.whole_model import ConversionReport, convert

__all__ = ["ConversionReport", "convert"]
