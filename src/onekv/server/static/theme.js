// Before the first paint, so that a page whose theme was chosen does not flash. The rest of the page is a module, and runs later.
const chosen = localStorage.getItem("onekv.theme");
if (chosen) document.documentElement.dataset.theme = chosen;
