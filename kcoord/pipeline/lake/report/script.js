(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const small = window.matchMedia("(max-width: 760px)");
  const looks = {
    light: { ink: "#1d2129", soft: "#687080", line: "#e9e6de", card: "#ffffff",
      heat: [[0, "#f3f2ec"], [0.25, "#fbe3b0"], [0.5, "#f4a74f"], [0.75, "#d9534a"], [1, "#7d1f3f"]],
      due: [[0, "#e3ebfb"], [1, "#3f6fd4"]] },
    dark: { ink: "#e6e9ef", soft: "#949dad", line: "#252b35", card: "#171b22",
      heat: [[0, "#1f2530"], [0.25, "#4d3a24"], [0.5, "#b4662a"], [0.75, "#ef6a4c"], [1, "#ffd6c4"]],
      due: [[0, "#22304e"], [1, "#7fa4f5"]] },
  };
  const theme = () => root.dataset.theme;

  function dressed(name, figure) {
    const look = looks[theme()];
    const layout = structuredClone(figure.layout);
    const axis = { gridcolor: look.line, zeroline: false, linecolor: look.line, tickcolor: look.line, automargin: true, ticks: "" };
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.font = { family: getComputedStyle(document.body).fontFamily, size: small.matches ? 11 : 12.5, color: look.soft };
    layout.hoverlabel = { bgcolor: look.card, bordercolor: look.line, font: { color: look.ink, size: 13 }, align: "left" };
    layout.xaxis = { ...axis, ...layout.xaxis };
    layout.yaxis = { ...axis, ...layout.yaxis, tickfont: { color: look.ink } };
    layout.dragmode = small.matches ? false : "zoom";
    if (small.matches) layout.yaxis.tickfont.size = 10;
    const data = structuredClone(figure.data);
    for (const trace of data) {
      if (trace.type === "heatmap") trace.colorscale = name === "expiry" ? look.due : look.heat;
      if (trace.type === "heatmap" && name === "expiry") trace.textfont = { color: look.ink, size: 11 };
      if (trace.colorbar) trace.colorbar = { ...trace.colorbar, outlinewidth: 0, tickfont: { color: look.soft } };
      if (trace.type === "bar" && trace.textposition) trace.textfont = { color: look.soft };
    }
    return [data, layout];
  }

  function draw(name) {
    const place = document.getElementById("plot-" + name);
    const figure = name === "owners" ? figures.owners[document.getElementById("owner").value] : figures[name];
    if (!place || !figure) return;
    const [data, layout] = dressed(name, figure);
    Plotly.react(place, data, layout, { responsive: true, displayModeBar: false, scrollZoom: false });
  }

  const drawAll = () => ["lag", "timeline", "owners", "expiry", "busiest"].forEach(draw);
  const button = document.getElementById("theme");
  function wear(name) {
    root.dataset.theme = name;
    button.textContent = name === "dark" ? "Light" : "Dark";
    drawAll();
  }
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const wanted = new URLSearchParams(location.search).get("theme");
  button.addEventListener("click", () => wear(theme() === "dark" ? "light" : "dark"));
  system.addEventListener("change", (event) => wear(event.matches ? "dark" : "light"));
  small.addEventListener("change", drawAll);
  document.getElementById("owner")?.addEventListener("change", () => draw("owners"));
  wear(wanted === "dark" || wanted === "light" ? wanted : system.matches ? "dark" : "light");
})();
