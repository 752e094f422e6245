#!/usr/bin/env python3
"""Time to encode a picture, strata against llama.cpp's mtmd, on the same encoder file, interleaved.

    python3 scripts/encoder_speed.py --mmproj MMPROJ.gguf --model MODEL.gguf --mtmd PATH/llama-mtmd-cli [--strata target/release/strata]
        [--sides 512,1024] [--threads 2] [--rounds 3]

MODEL is any text model as wide as the encoder's rows; only llama.cpp needs it. Pictures of SIDE x SIDE pixels are drawn here.
strata's time is what `strata vision --json` calls the encoder's, llama.cpp's the one it prints for the picture. Prints the median of
each, the smallest and largest, and the median of the paired ratios. Standard library only.
"""
import argparse
import json
import random
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import zlib


def picture(path, side):
    """A PNG of random blocks."""
    draw = random.Random(side)
    colours = [[bytes(draw.randrange(256) for _ in range(3)) for _ in range(side // 16)] for _ in range(side // 16)]
    rows = b"".join(b"\0" + b"".join(colours[y // 16][x // 16] for x in range(side)) for y in range(side))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mmproj", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--mtmd", required=True)
    parser.add_argument("--strata", default="target/release/strata")
    parser.add_argument("--sides", default="512,1024")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    def strata(path):
        command = [args.strata, "vision", path, "--mmproj", args.mmproj, "-t", str(args.threads), "--vision-tokens", "4096", "--json"]
        report = json.loads(run(command).stdout)
        return report["milliseconds"]["encode"] / 1000, report["tokens"]

    def mtmd(path):
        command = [args.mtmd, "-m", args.model, "--mmproj", args.mmproj, "--image", path, "-p", "x", "-n", "1", "-t", str(args.threads)]
        done = run(command + ["-c", "4096", "--no-warmup", "--image-max-tokens", "4096"])
        found = re.search(r"encod\w+ (?:done )?in (\d+) ms", done.stderr + done.stdout)
        if not found:
            sys.exit(f"no encoding time in what llama-mtmd-cli printed:\n{done.stderr[-2000:]}")
        return int(found[1]) / 1000

    for side in map(int, args.sides.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/{side}.png"
            picture(path, side)
            ours, theirs = [], []
            for _ in range(args.rounds):
                seconds, tokens = strata(path)
                ours.append(seconds)
                theirs.append(mtmd(path))
            ratios = [b / a for a, b in zip(ours, theirs)]
            spread = lambda values: f"{statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"
            print(f"{side}x{side}, {tokens} tokens: strata {spread(ours)}, llama.cpp {spread(theirs)}, ratio {statistics.median(ratios):.2f}", flush=True)


if __name__ == "__main__":
    main()
