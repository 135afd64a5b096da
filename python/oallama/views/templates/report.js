"use strict";
// What a cell of a map is, below the map: by pointer, and by the arrow keys once the map has the focus.
for (const map of document.querySelectorAll(".placement")) {
  const facts = map.closest("section").querySelector(".facts");
  const cells = [...map.querySelectorAll(".cell")];
  const at = new Map(cells.map((cell) => [`${cell.dataset.column},${cell.dataset.row}`, cell]));
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const farthest = 200; // a cell may lack neighbours
  const show = (cell) => { facts.textContent = cell.querySelector("title").textContent; };
  for (const cell of cells) {
    cell.addEventListener("pointerenter", () => show(cell));
    cell.addEventListener("focus", () => show(cell));
    cell.addEventListener("keydown", (event) => {
      const [right, down] = moves[event.key] ?? [0, 0];
      if (right || down) event.preventDefault();
      for (let i = 1; (right || down) && i < farthest; ++i) {
        const next = at.get(`${Number(cell.dataset.column) + i * right},${Number(cell.dataset.row) + i * down}`);
        if (!next) continue;
        cell.tabIndex = -1;
        next.tabIndex = 0;
        next.focus();
        return;
      }
    });
  }
  if (cells.length) cells[0].tabIndex = 0;
}
