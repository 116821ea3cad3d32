"use strict";
// Draws the plots that stand as JSON in the page, in the colours of the reader's scheme, and sorts tables by a heading.
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: "hover",
    // Only these: the library's usual ones can send a plot to a server.
    modeBarButtons: [["toImage", "resetScale2d"]],
    plotlyServerURL: "",
  };

  const template = (isDark) => {
    const ink = isDark ? "#e4e8eb" : "#1c2126";
    const grid = isDark ? "#323b42" : "#e3e7ea";
    const axis = { gridcolor: grid, zerolinecolor: isDark ? "#58636c" : "#b9c1c8", linecolor: grid,
      title: { standoff: 8 }, exponentformat: "none" };
    return {
      layout: {
        font: { family: 'system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif', size: 12, color: ink },
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        hoverlabel: { bgcolor: isDark ? "#2a3238" : "#ffffff", bordercolor: grid, font: { color: ink, size: 12 }, align: "left" },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: isDark ? "#6b767f" : "#b9c1c8", activecolor: ink },
        xaxis: axis,
        yaxis: axis,
      },
    };
  };

  const plots = JSON.parse(document.getElementById("plots").textContent);
  const places = [...document.querySelectorAll("[data-plot]")];
  const draw = (place) => {
    const plot = plots[place.dataset.plot];
    const layout = { ...structuredClone(plot.layout), template: template(dark.matches) };
    return Plotly.newPlot(place, plot.data, layout, config).then(fit).then(() => place.on("plotly_relayout", () => fit(place)));
  };
  // The title of an axis that is longer than the axis is written in several lines.
  const CHARACTER_PX = 8;
  // What it may reach over each end of the axis: the margin of the plot.
  const MARGIN_PX = 12;
  const inLines = (text, width) => {
    const lines = [];
    for (const word of text.split(" ")) {
      const longer = lines.length ? `${lines.at(-1)} ${word}` : "";
      if (longer && longer.length * CHARACTER_PX <= width) lines[lines.length - 1] = longer;
      else lines.push(word);
    }
    return lines.join("<br>");
  };
  const fit = (place) => {
    const title = inLines(plots[place.dataset.plot].layout.xaxis.title.text,
      place.querySelector(".nsewdrag").getBoundingClientRect().width + 2 * MARGIN_PX);
    return title === place.layout.xaxis.title.text ? place : Plotly.relayout(place, { "xaxis.title.text": title });
  };
  const recolour = (isDark) => places.forEach((place) => Plotly.relayout(place, { template: template(isDark) }));
  Promise.all(places.map(draw)).then(() => document.body.setAttribute("data-drawn", String(places.length)));
  dark.addEventListener("change", () => recolour(dark.matches));
  window.addEventListener("beforeprint", () => recolour(false));
  window.addEventListener("afterprint", () => recolour(dark.matches));

  const compared = (one, other, isNumber) =>
    isNumber ? Number(one) - Number(other) : one.localeCompare(other, "en", { numeric: true });

  // Rows without a value stay last in both orders; equal ones keep their order.
  const sort = (table, heading) => {
    const descending = heading.getAttribute("aria-sort") === "ascending";
    const column = heading.cellIndex;
    const isNumber = heading.classList.contains("number");
    const body = table.tBodies[0];
    const keyed = [...body.rows].map((row) => ({ row, key: row.cells[column].dataset.key }));
    const present = keyed.filter(({ key }) => key !== undefined);
    const absent = keyed.filter(({ key }) => key === undefined);
    present.sort((a, b) => (descending ? -1 : 1) * compared(a.key, b.key, isNumber));
    body.append(...[...present, ...absent].map(({ row }) => row));
    for (const each of heading.parentNode.cells) each.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    for (const heading of table.tHead.rows[0].cells) {
      heading.querySelector("button").addEventListener("click", () => sort(table, heading));
    }
  }
  // A table that is wider than the page fades out at its edge until it is scrolled to the end.
  for (const box of document.querySelectorAll(".scroll")) {
    const show = () => {
      box.classList.toggle("wide", box.scrollWidth > box.clientWidth + 1);
      box.classList.toggle("cut", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
    };
    box.addEventListener("scroll", show);
    window.addEventListener("resize", show);
    show();
  }
})();
