"""Version and licence of the distribution."""

__version__ = "0.1.0"
__license__ = "Apache-2.0"
