"""A Model Context Protocol server of two tools, on standard input and output. Needs the extra `tools`."""

from datetime import datetime

from mcp.server import MCPServer

server = MCPServer("clock and weather")


@server.tool()
def get_time() -> str:
    """Returns the current time."""
    return datetime.now().strftime("%H:%M")


@server.tool()
def get_weather(city: str) -> dict[str, str]:
    """Returns the weather of a city."""
    weather = ("raining", "sunny", "cloudy", "snowing")
    return {"city": city, "weather": weather[len(city) % 4]}


if __name__ == "__main__":
    server.run()
