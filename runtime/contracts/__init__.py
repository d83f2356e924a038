"""What each runtime accepts, refuses, and takes silently wrong. Pure functions over headers and markers."""
