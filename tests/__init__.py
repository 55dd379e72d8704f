"""Tests; a package so that they can share helpers under the importlib import mode."""
