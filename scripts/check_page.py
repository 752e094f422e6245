#!/usr/bin/env python3
"""Drives the chat page of a strata server in headless Chromium and takes screenshots.

    apt-get install chromium chromium-driver; pip install selenium
    strata serve --port 8080 &
    python scripts/check_page.py http://127.0.0.1:8080 --out /tmp/page

Checks: loads without errors and without anything from elsewhere, sends by keyboard, streams, stops, folds thinking,
renders Markdown and code without running model text as HTML, attaches a picture (when the server reads them), shows the
monitor, names every control for screen readers.
"""
import argparse
import os
import struct
import sys
import time
import zlib

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

parser = argparse.ArgumentParser()
parser.add_argument("url", nargs="?", default="http://127.0.0.1:8080")
parser.add_argument("--out", default="/tmp/page")
args = parser.parse_args()
os.makedirs(args.out, exist_ok=True)

options = webdriver.ChromeOptions()
for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,850", "--disable-gpu"):
    options.add_argument(flag)
options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
wait = WebDriverWait(driver, 60, poll_frequency=0.05)
results = []


def check(name, holds, detail=""):
    results.append(bool(holds))
    print(f"{'ok  ' if holds else 'FAIL'}  {name} {detail if not holds else ''}")


def one(selector):
    return driver.find_element(By.CSS_SELECTOR, selector)


def shot(name):
    driver.save_screenshot(f"{args.out}/{name}.png")


def idle():
    wait.until(lambda d: not d.find_element(By.ID, "send").get_property("disabled"))


driver.get(args.url)
wait.until(lambda d: one("#model").text)
shot("1-start")
check("the message box has the focus", driver.switch_to.active_element.get_attribute("id") == "prompt")

prompt = one("#prompt")
prompt.send_keys("Tell me a story about a fox.", Keys.ENTER)
wait.until(lambda d: d.find_elements(By.CSS_SELECTOR, "article.assistant"))
wait.until(lambda d: d.find_elements(By.CSS_SELECTOR, "details.thinking") or one("article.assistant .body").text)
shot("2-streaming")
idle()
shot("3-answered")
check("an answer is shown", len(one("article.assistant").text) > 20)
if driver.find_elements(By.CSS_SELECTOR, "details.thinking"):
    check("thinking is folded", not one("details.thinking").get_property("open"))
check("the answer's footer has its speed", "tok/s" in one("article.assistant footer").text)

one("#show-settings").click()
one("#system").send_keys("You are brief.")
one("#thinking").click()
one("#max_tokens").send_keys("3000")
one("#show-monitor").click()
prompt = one("#prompt")
prompt.send_keys("Count as far as you can, in words, and never stop.", Keys.ENTER)
wait.until(lambda d: len(d.find_elements(By.CSS_SELECTOR, "article.assistant")) == 2)
time.sleep(2.2)
shot("4-monitor")
check("the monitor shows the slots", len(driver.find_elements(By.CSS_SELECTOR, "#slots tr")) >= 1)
check("the monitor shows numbers", "tok/s" in one("#numbers").text)
stopped_early = not one("#stop").get_property("disabled")
if stopped_early:
    prompt.send_keys(Keys.ESCAPE)
    idle()
    check("Escape stops the answer", "Stopped" in driver.find_elements(By.CSS_SELECTOR, "article.assistant")[1].text)
one("#max_tokens").clear()
one("#max_tokens").send_keys("60")
one("#show-settings").click()
one("#show-monitor").click()

# Markdown of hostile and ordinary text, through the page's own renderer.
rendered = driver.execute_async_script("""
    const done = arguments[0];
    import('/page/markdown.js').then(({markdown}) => {
        const text = [
            '# Title', '', 'Some **bold**, *slanted*, `code` and ~~old~~ text.',
            '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>',
            '[bad](javascript:window.pwned=1) [good](https://example.org/a_b) https://example.org/x.',
            '', '- one', '- two', '  - nested', '', '3. three', '4. four', '', '> a quote', '',
            '| a | b |', '|---|---|', '| 1 | 2 |', '', '```python', 'def f(x):', '    return x < 3 & 4', '```', '',
            'unclosed ```', '```', 'open fence'].join('\\n');
        const box = document.createElement('article');
        box.className = 'assistant';
        const body = document.createElement('div');
        body.className = 'body';
        body.append(...markdown(text));
        box.append(body);
        document.getElementById('log').append(box);
        box.scrollIntoView();
        setTimeout(() => done({
            html: body.innerHTML, pwned: !!window.pwned, images: body.querySelectorAll('img,script').length,
            code: body.querySelector('pre code').textContent, links: [...body.querySelectorAll('a')].map(a => a.href),
            lists: body.querySelectorAll('ul ul li').length, start: body.querySelector('ol').start,
            cells: body.querySelectorAll('td').length}), 300);
    });""")
shot("5-markdown")
check("model text never becomes HTML", not rendered["pwned"] and rendered["images"] == 0, rendered)
check("code is kept as it is", rendered["code"] == "def f(x):\n    return x < 3 & 4", rendered)
check("only http links can be followed", rendered["links"] == ["https://example.org/a_b", "https://example.org/x"], rendered)
check("lists nest and count", rendered["lists"] == 1 and rendered["start"] == 3, rendered)
check("tables have cells", rendered["cells"] == 2, rendered)


def png(width, height, colour):
    raw = b"".join(b"\0" + bytes(colour) * width for _ in range(height))
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b""))


if one("#attach-label").is_displayed():
    path = f"{args.out}/red.png"
    with open(path, "wb") as file:
        file.write(png(128, 128, (220, 30, 30)))
    one("#new-chat").click()
    one("#attach").send_keys(os.path.abspath(path))
    wait.until(lambda d: d.find_elements(By.CSS_SELECTOR, "#pictures img"))
    one("#prompt").send_keys("What colour is this?", Keys.ENTER)
    time.sleep(0.2)
    idle()
    shot("6-picture")
    check("a picture is answered", one("article.assistant .body").text and "error" not in one("#status").get_attribute("class"),
          one("#status").text)

unnamed = driver.execute_script("""
    return [...document.querySelectorAll('button, input, textarea, a')].filter((e) => {
        const label = e.labels && e.labels.length && e.labels[0].textContent.trim();
        return !(e.textContent.trim() || e.getAttribute('aria-label') || label);
    }).map((e) => e.outerHTML);""")
check("every control has a name", not unnamed, unnamed)
driver.set_window_size(420, 800)
time.sleep(0.3)
shot("7-narrow")
wide = driver.execute_script("return document.documentElement.scrollWidth > window.innerWidth")
check("a narrow window needs no sideways scrolling", not wide)

severe = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
check("no errors in the console", not severe, severe)
foreign = [entry["message"] for entry in driver.get_log("performance")
           if '"Network.requestWillBeSent"' in entry["message"] and '"url":"http' in entry["message"]
           and f'"url":"{args.url}' not in entry["message"]]
check("nothing is loaded from elsewhere", not foreign, foreign[:2])
driver.quit()
print(f"{sum(results)} of {len(results)} checks passed; screenshots in {args.out}")
sys.exit(0 if all(results) else 1)
