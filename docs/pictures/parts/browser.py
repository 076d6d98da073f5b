"""Screenshots in headless Chromium."""

import subprocess

BROWSER = "chromium-headless-shell"
LIGHT, DARK = 1, 0  # values of Blink's preferredColorScheme
MOST_BYTES = 150_000  # of a picture: each clone has all of them
TIMEOUT_S = 120


def shoot(address, path, width, height, scheme=LIGHT):
    """Writes a PNG of a page. SystemExit if the browser fails or the picture is too large."""
    path.unlink(missing_ok=True)
    done = subprocess.run(
        [BROWSER, "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         f"--window-size={width},{height}", f"--screenshot={path}",
         f"--blink-settings=preferredColorScheme={scheme}", address],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if not path.exists():
        raise SystemExit(f"{BROWSER} made no picture of {address}:\n{done.stderr[-2000:]}")
    size = path.stat().st_size
    print(f"{path}: {size} bytes")
    if size > MOST_BYTES:
        raise SystemExit(f"{path}: got {size} bytes, limit {MOST_BYTES}")
