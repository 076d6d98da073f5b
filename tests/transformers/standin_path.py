"""Puts the stand-in of transformers, and the client, where `import` finds them first."""

import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER / "standin"))
