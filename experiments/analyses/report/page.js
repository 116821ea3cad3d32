"use strict";
// Draws the plots that stand as JSON in the page, in the colours of the reader's scheme and for the window's width; lets
// a reader choose the front's cost and axis and the samples that are shown; sorts tables by a heading.
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const config = {
    displayModeBar: false,
    // The library's usual buttons can send a plot to a server.
    plotlyServerURL: "",
  };
  // On a dark page what recedes is dark, what stands out is light: colours of marks there, by those on a light one.
  const ON_DARK = {
    "#C4C4C4": "#4b555d", "#BBBBBB": "#5b666f", "#222222": "#f2f5f7", "#666666": "#9aa5af", "#000000": "#f2f5f7",
    "#0072B2": "#4aa8ef", "#56B4E9": "#a5d8f6", "#009E73": "#2fc597", "#D55E00": "#ff8a3c", "#CC79A7": "#e79cc6",
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
        xaxis: axis,
        yaxis: axis,
      },
    };
  };

  // The texts in bars stay readable on their colours: black or white by relative luminance (WCAG 2.2).
  const inkOn = (fill) => {
    const [red, green, blue] = [1, 3, 5].map((at) => {
      const part = parseInt(fill.slice(at, at + 2), 16) / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
  };
  // Every colour in a plot by the scheme of the page.
  const coloured = (part, isDark) => {
    if (!isDark) return part;
    if (typeof part === "string") return ON_DARK[part.toUpperCase()] ?? part;
    if (Array.isArray(part)) return part.length && typeof part[0] === "object" ? part.map((each) => coloured(each, true)) : part;
    if (part === null || typeof part !== "object") return part;
    const found = Object.fromEntries(Object.entries(part).map(([key, each]) => [key, coloured(each, true)]));
    if (found.insidetextfont) found.insidetextfont = { ...found.insidetextfont, color: inkOn(found.marker.color) };
    return found;
  };

  const plots = JSON.parse(document.getElementById("plots").textContent);
  const NARROW_PX = 520;
  // Of a bar with its name above, in a narrow plot.
  const BAR_PX = 38;
  // Names beside bars would leave no room for the bars: there they stand above them, and the plot is higher.
  const isGrouped = (place) => plots[place.dataset.plot].data.some((trace) => trace.type === "bar" && trace.width < 0.5);
  const withNamesAbove = (place, layout) => {
    const axis = layout.yaxis;
    const isNarrow = place.clientWidth < NARROW_PX && axis.ticktext?.some((text) => text.length > 12) && !isGrouped(place);
    place.style.height = isNarrow ? `${Math.max(place.dataset.height, BAR_PX * axis.ticktext.length + 110)}px` : `${place.dataset.height}px`;
    if (!isNarrow) return layout;
    const names = axis.ticktext.map((text, at) => ({
      x: 0, xref: "paper", xanchor: "left", y: axis.tickvals[at], yanchor: "bottom", yshift: 7, showarrow: false, text,
      font: { size: 11 },
    }));
    return { ...layout, annotations: [...(layout.annotations ?? []), ...names], yaxis: { ...axis, showticklabels: false } };
  };
  const shown = (place, isDark = dark.matches) => {
    const plot = coloured(structuredClone(plots[place.dataset.plot]), isDark);
    const layout = withNamesAbove(place, { ...plot.layout, template: template(isDark) });
    if (layout.yaxis.showticklabels === false) {
      for (const trace of plot.data.filter(({ type }) => type === "bar")) trace.width *= 0.45;
    }
    const axis = place.dataset.axis;
    if (axis === "log" || axis === "fit") {
      // Ends of what the marks reach.
      const { range, ...free } = layout.xaxis;
      layout.xaxis = { ...free, autorange: true, type: axis === "log" ? "log" : "linear" };
      delete layout.xaxis.rangemode;
      const reached = plot.data.filter(({ mode }) => mode?.startsWith("markers")).flatMap(({ x }) => x);
      const middle = (Math.min(...reached) + Math.max(...reached)) / 2;
      // A label of the leftmost marks would lie on the axis.
      for (const trace of plot.data.filter(({ textposition }) => Array.isArray(textposition))) {
        trace.textposition = trace.textposition.map((side, at) =>
          side.startsWith("bottom") ? side : trace.x[at] < middle ? "top right" : "top left");
      }
    }
    return { data: plot.data, layout };
  };
  const places = [...document.querySelectorAll("[data-plot]")].filter((place) => place.dataset.plot);
  const draw = (place) => {
    place.dataset.height ??= parseFloat(place.style.height);
    const { data, layout } = shown(place);
    // A plot that is there keeps its size until it is told.
    const isThere = place.classList.contains("js-plotly-plot");
    return Plotly.react(place, data, layout, config)
      .then(() => (isThere && getComputedStyle(place).display !== "none" ? Plotly.Plots.resize(place) : place))
      .then(() => fit(place));
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
  // Of labels that would lie on each other the first one stays; a hover names each mark.
  const untangle = (place) => {
    const kept = [];
    for (const label of place.querySelectorAll(".textpoint text")) {
      label.style.visibility = "";
      const box = label.getBoundingClientRect();
      const meets = kept.some((other) => box.left < other.right && other.left < box.right
        && box.top < other.bottom - 2 && other.top < box.bottom - 2);
      if (meets) label.style.visibility = "hidden";
      else kept.push(box);
    }
    return place;
  };
  const fit = (place) => {
    const title = inLines(plots[place.dataset.plot].layout.xaxis.title.text,
      place.querySelector(".nsewdrag").getBoundingClientRect().width + 2 * MARGIN_PX);
    return title === place.layout.xaxis.title.text ? untangle(place)
      : Plotly.relayout(place, { "xaxis.title.text": title }).then(untangle);
  };
  const drawn = new Set();
  const drawAll = (some = places) =>
    Promise.all(some.filter((place) => !place.closest("details:not([open])")).map((place) => {
      drawn.add(place);
      return draw(place);
    })).then(() => document.body.setAttribute("data-drawn", String(drawn.size)));
  const again = () => Promise.all([...drawn].map(draw));
  drawAll();
  dark.addEventListener("change", again);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    // A telephone's address bar changes the height alone.
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    again();
  });
  // Parts of the page that are folded are drawn when they are opened.
  for (const fold of document.querySelectorAll("details.fold")) {
    fold.addEventListener("toggle", () => drawAll(places.filter((place) => fold.contains(place) && !drawn.has(place))));
  }
  const recolour = (isDark) => [...drawn].forEach((place) => {
    const { data, layout } = shown(place, isDark);
    Plotly.react(place, data, layout, config);
  });
  window.addEventListener("beforeprint", () => recolour(false));
  window.addEventListener("afterprint", () => recolour(dark.matches));
  for (const button of document.querySelectorAll(".save")) {
    const place = button.parentNode.querySelector("[data-plot]");
    button.addEventListener("click", async () => {
      const { data, layout } = shown(place, false);
      const size = { width: place.clientWidth, height: place.clientHeight };
      const figure = { data, layout: { ...layout, ...size, paper_bgcolor: "#ffffff" } };
      const options = { format: "png", filename: place.dataset.plot, scale: 2, ...size };
      if (!button.classList.contains("copy")) return Plotly.downloadImage(figure, options);
      // The page may fetch nothing, not even a data URI.
      const letters = atob((await Plotly.toImage(figure, options)).split(",")[1]);
      const picture = new Blob([Uint8Array.from(letters, (each) => each.charCodeAt(0))], { type: "image/png" });
      await navigator.clipboard.write([new ClipboardItem({ "image/png": picture })]);
      button.textContent = "copied";
    });
  }

  // The rows of the first table as text, with how they were measured below.
  const escaped = (text) => text.replace(/[\\{}$&#^_%~]/g, (each) => ({ "\\": "\\textbackslash{}", "^": "\\^{}", "~": "\\~{}" })[each] ?? `\\${each}`);
  const asText = (form, table) => {
    const rows = [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent.replace(/\s+/g, " ").trim()));
    const words = (selector) => document.querySelector(selector).textContent.replace(/\s+/g, " ").trim();
    const caption = `${words("h1")}: ${words(".subtitle")}. ${words("#settings .beside > .quiet").replace("A click on a heading sorts.", "")}`.trim();
    if (form === "markdown") {
      const lines = rows.map((cells) => `| ${cells.map((cell) => cell.replaceAll("|", "\\|")).join(" | ")} |`);
      lines.splice(1, 0, `|${" --- |".repeat(rows[0].length)}`);
      return `${lines.join("\n")}\n\n${caption}\n`;
    }
    const lines = rows.map((cells) => `${cells.map(escaped).join(" & ")} \\\\`);
    lines.splice(1, 0, "\\hline");
    return `\\begin{table}\n\\begin{tabular}{${"l".repeat(rows[0].length)}}\n${lines.join("\n")}\n\\end{tabular}\n\\caption{${escaped(caption)}}\n\\end{table}\n`;
  };
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
      const place = button.closest(".beside");
      const text = asText(button.dataset.copy, place.querySelector("table"));
      button.value = text;
      await navigator.clipboard.writeText(text);
      place.querySelector("output").textContent = "copied";
    });
  }

  // One button of a group is pressed.
  const press = (group, value) => {
    for (const button of group.querySelectorAll("button")) button.ariaPressed = String(button.value === value);
  };
  const pressed = (group) => group?.querySelector('[aria-pressed="true"]')?.value;

  const front = document.getElementById("front");
  if (front) {
    const captions = [...front.querySelectorAll("[data-front]")];
    const groups = Object.fromEntries([...front.querySelectorAll("[data-choice]")].map((each) => [each.dataset.choice, each]));
    const place = front.querySelector("[data-plot]");
    const found = () => captions.find((each) => each.dataset.cost === pressed(groups.cost)
      && (!groups.task || each.dataset.task === pressed(groups.task)));
    const show = () => {
      const now = found();
      for (const each of captions) each.hidden = each !== now;
      const isThere = now && now.dataset.front in plots;
      place.hidden = !isThere;
      if (isThere) {
        place.dataset.plot = now.dataset.front;
        place.dataset.axis = pressed(groups.axis);
        if (drawn.has(place)) draw(place);
      }
    };
    const first = captions.find((each) => each.dataset.front === place.dataset.plot);
    press(groups.cost, first.dataset.cost);
    if (groups.task) press(groups.task, first.dataset.task);
    press(groups.axis, "zero");
    for (const button of groups.cost.querySelectorAll("button")) {
      const hasNone = captions.filter((each) => each.dataset.cost === button.value).every((each) => !(each.dataset.front in plots));
      button.classList.toggle("without", hasNone);
    }
    for (const group of Object.values(groups)) {
      group.addEventListener("click", (event) => {
        if (event.target.matches("button")) { press(group, event.target.value); show(); }
      });
    }
    show();
  }

  const samples = document.getElementById("samples");
  if (samples) {
    const group = samples.querySelector("[data-filter]");
    const setting = samples.querySelector("select");
    const articles = [...samples.querySelectorAll("article")];
    const show = () => {
      const filter = pressed(group), at = setting.value;
      for (const each of articles) {
        const wrong = each.dataset.wrong.split(" ").filter(Boolean);
        each.hidden = (filter === "differs" && !("differs" in each.dataset))
          || (filter === "wrong" && !(at ? wrong.includes(at) : wrong.length));
        for (const answer of each.querySelectorAll("[data-at]")) {
          answer.classList.toggle("chosen", at !== "" && answer.dataset.at.split(" ").includes(at));
        }
      }
      const count = articles.filter((each) => !each.hidden).length;
      samples.querySelector("output").textContent = `${count} of ${articles.length} shown`;
    };
    press(group, "all");
    group.addEventListener("click", (event) => {
      if (event.target.matches("button")) { press(group, event.target.value); show(); }
    });
    setting.addEventListener("change", show);
    show();
  }

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
  // Rows of one accepted loss, or at the slider's left end all of them.
  const prices = document.querySelector("#prices");
  if (prices) {
    const [slider, shown] = [prices.querySelector("input"), prices.querySelector("output")];
    const rows = [...prices.querySelectorAll("tbody tr")];
    const column = [...prices.querySelector("thead tr").cells].findIndex((each) => each.textContent === "accepted loss");
    const lossOf = (row) => row.cells[column].textContent;
    const losses = [...new Set(rows.map(lossOf))];
    slider.max = losses.length;
    const show = () => {
      const loss = losses[slider.value - 1];
      for (const row of rows) row.hidden = loss !== undefined && lossOf(row) !== loss;
      shown.textContent = loss === undefined ? "any" : `${loss} points`;
    };
    slider.addEventListener("input", show);
    show();
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
