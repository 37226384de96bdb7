"""The import path that Ray Serve configurations name: `cluster.serve:build_app`."""

from cluster.ray_serve.app import build_app

__all__ = ["build_app"]
