"""What all programs ask, each in the words of its library, and how they print what they got."""

import json
import sys

from pydantic import BaseModel

URL = sys.argv[1]
MODEL = "mock-model"
HELLO = "Say hello."
WEATHER = "How is the weather in Oslo?"
DESCRIBE = "Describe Oslo."
MEASURE = "Measure Bergen."


class Place(BaseModel):
    """What a place is like."""

    name: str
    degrees: int


def weather(city: str) -> str:
    """Tell the weather in a city.

    Args:
        city: The name of the city.
    """
    return f"{len(city) + 3} degrees in {city}"


def tell(**found: object) -> None:
    """Print results, which the test reads: a line for each API that a program goes over."""
    print(json.dumps(found, default=lambda value: value.model_dump()))
