"""What tests put into the page: a tap on what it plays, and a look at what a person would see."""

from __future__ import annotations

import base64

import numpy as np

from tests.support.chromium import Page

TAP_MODULE = "tap-worklet.js"
TAP_WORKLET = """
    registerProcessor("tap", class extends AudioWorkletProcessor {
        process([channels]) {
            this.port.postMessage(channels.length ? channels[0].slice() : new Float32Array(128));
            return true;
        }
    });
"""
# Whatever the page connects to the loudspeaker is connected to the tap of that context as well.
TAP = """if (window.AudioWorklet) {
    window.tapped = { rate: 0, blocks: [] };
    const addModule = AudioWorklet.prototype.addModule;
    AudioWorklet.prototype.addModule = async function (url) {
        await addModule.call(this, new URL("/static/MODULE", location.href));
        return addModule.call(this, url);
    };
    const taps = new WeakMap();
    const connect = AudioNode.prototype.connect;
    AudioNode.prototype.connect = function (target, ...rest) {
        if (target instanceof AudioDestinationNode) {
            if (!taps.has(this.context)) {
                const mono = { channelCount: 1, channelCountMode: "explicit" };
                const tap = new AudioWorkletNode(this.context, "tap", mono);
                window.tapped = { rate: this.context.sampleRate, blocks: [] };
                tap.port.onmessage = ({ data }) => window.tapped.blocks.push(data);
                connect.call(tap, target);
                taps.set(this.context, tap);
            }
            connect.call(this, taps.get(this.context));
            return target;
        }
        return connect.call(this, target, ...rest);
    };
}""".replace("MODULE", TAP_MODULE)
PLAYED = """(() => {
    const all = new Float32Array(window.tapped.blocks.length * 128);
    window.tapped.blocks.forEach((block, index) => all.set(block, 128 * index));
    const bytes = new Uint8Array(all.buffer);
    let text = "";
    for (let at = 0; at < bytes.length; at += 32768) text += String.fromCharCode(...bytes.subarray(at, at + 32768));
    return btoa(text);
})()"""
FAULTS = """(() => {
    const faults = [];
    const name = (element) => `${element.tagName.toLowerCase()}#${element.id}.${element.className}`;
    const root = document.documentElement;
    const excess = root.scrollWidth - root.clientWidth;
    if (excess > 0) faults.push(`scrolls sideways by ${excess} pixels`);
    const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
    const context = canvas.getContext("2d", { willReadFrequently: true });
    const rgba = (colour) => {
        context.clearRect(0, 0, 1, 1);
        context.fillStyle = colour;
        context.fillRect(0, 0, 1, 1);
        return [...context.getImageData(0, 0, 1, 1).data];
    };
    const luminance = (colour) => {
        const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        const [r, g, b] = colour.map((c) => linear(c / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const colour = rgba(getComputedStyle(at).backgroundColor);
            if (colour[3] === 255) return colour;
        }
        return [255, 255, 255, 255];
    };
    const contrast = (element, pseudo) => {
        const lights = [luminance(rgba(getComputedStyle(element, pseudo).color)), luminance(ground(element))];
        const [light, dark] = lights.sort((a, b) => b - a);
        return (light + 0.05) / (dark + 0.05);
    };
    for (const element of document.querySelectorAll("body *")) {
        if (!element.checkVisibility()) continue;
        const written = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        const field = element.matches("input, textarea, select");
        const weakest = Math.min(contrast(element), element.placeholder ? contrast(element, "::placeholder") : 21);
        if ((written || field) && weakest < 4.5) faults.push(`${name(element)}: contrast ${weakest.toFixed(2)}`);
        const box = element.getBoundingClientRect();
        if (element.matches("button, input, select, textarea") && Math.min(box.width, box.height) < 44) {
            faults.push(`${name(element)}: ${box.width} x ${box.height} pixels`);
        }
        if (written && (box.left < 0 || box.right > root.clientWidth)) faults.push(`${name(element)}: cut off`);
    }
    return faults;
})()"""


def tap(page: Page) -> None:
    """Record what pages opened from now on play."""
    page.substitute(TAP_MODULE, TAP_WORKLET)
    page.call("Page.addScriptToEvaluateOnNewDocument", source=TAP)


def played(page: Page) -> tuple[np.ndarray, int]:
    """What the page's last audio graph sent to the loudspeaker, float32 (S,), and its rate."""
    samples = np.frombuffer(base64.b64decode(page.evaluate(PLAYED)), "<f4")
    return samples, page.evaluate("window.tapped.rate")


def faults(page: Page) -> list[str]:
    """What is wrong with the page as it is shown: sideways scrolling, contrast, small targets, text cut off."""
    return page.evaluate(FAULTS)


def talk(page: Page, url: str) -> None:
    """Open the page and press Talk."""
    page.open(url)
    page.wait_state("ready", "busy")
    page.click("#talk")


def captions(page: Page) -> list[list[str]]:
    """The turns as they are shown: who, and what."""
    turns = "[...document.querySelectorAll('.turn')]"
    return page.evaluate(f"{turns}.map((turn) => [...turn.children].map((part) => part.textContent))")
