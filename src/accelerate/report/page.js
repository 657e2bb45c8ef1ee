"use strict";
// The values of a chart beside the pointer, from the paths of its lines; the page needs none of this.
const LEFT = 60, RIGHT = 384, TOP = 10, BOTTOM = 166;
const number = (value) => Number(value.toPrecision(4)).toString();
const points = (path) => [...path.getAttribute("d").matchAll(/[ML]([\d.]+) ([\d.]+)/g)].map((m) => [+m[1], +m[2]]);
for (const figure of document.querySelectorAll("figure")) {
  const svg = figure.querySelector("svg"), output = figure.querySelector("output");
  const [x0, x1] = svg.dataset.x.split(" ").map(Number), [y0, y1] = svg.dataset.y.split(" ").map(Number);
  let lines;
  svg.addEventListener("pointermove", (event) => {
    lines ??= [...svg.querySelectorAll("path[data-label]")].map((path) => [path.dataset.label, points(path)]);
    const box = svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * 400;
    const texts = lines.map(([label, all]) => {
      const [px, py] = all.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
      const step = Math.round(x0 + ((px - LEFT) / (RIGHT - LEFT)) * (x1 - x0));
      return `${label}: ${number(y0 + ((BOTTOM - py) / (BOTTOM - TOP)) * (y1 - y0))} at step ${step}`;
    });
    output.textContent = texts.join("; ");
  });
  svg.addEventListener("pointerleave", () => { output.textContent = ""; });
}
