// Draws the saved Plotly figures of a page, in the colours of the page.
(function () {
  const found = document.querySelectorAll(".figure > script");
  if (!found.length) return;
  const here = document.querySelector('script[src$="figures.js"]').src;
  const script = document.createElement("script");
  script.src = here.replace("figures.js", "plotly.min.js");
  script.onload = draw;
  document.head.append(script);
  function draw() {
    const style = getComputedStyle(document.body);
    const ink = style.getPropertyValue("--md-typeset-color") || style.color;
    found.forEach((data) => {
      const figure = JSON.parse(data.textContent);
      const layout = Object.assign({}, figure.layout, { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" });
      layout.font = Object.assign({}, layout.font, { color: ink.trim() });
      Plotly.newPlot(data.parentElement, figure.data, layout, { responsive: true });
    });
  }
  new MutationObserver(draw).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
})();
