from weft.api import TrainingFailed as TrainingFailed
from weft.api import compare as compare
from weft.api import generate as generate
from weft.api import launch as launch
from weft.api import load_model as load_model
from weft.api import load_text_model as load_text_model
from weft.api import open_run as open_run
from weft.api import plan as plan
from weft.api import train as train
from weft.api import verify as verify
from weft.config.errors import InvalidConfig as InvalidConfig
from weft.config.errors import WeftError as WeftError

__version__: str
