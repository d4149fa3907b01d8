// Keeps the page as it is on the server: fetches it every few seconds while somebody looks, and says when it cannot.
"use strict";
const EVERY_MS = 3000, PATIENCE_MS = 10000;
let answered = Date.now();

async function refresh() {
  if (document.hidden) return;
  try {
    const answer = await fetch("/", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!answer.ok) throw new Error(answer.statusText);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of ["header", "main"]) document.querySelector(part).replaceWith(page.querySelector(part));
    document.title = page.title;
    answered = Date.now();
  } catch { /* Said below. */ }
}

function tell() {
  const ageS = Math.round((Date.now() - answered) / 1000), isStale = ageS * 1000 > 3 * EVERY_MS;
  document.body.classList.toggle("stale", isStale);
  document.getElementById("age").textContent = isStale ? `no answer for ${ageS} s` : `as of ${new Date(answered).toLocaleTimeString()}`;
}

async function run() {
  for (;;) {
    await new Promise((done) => setTimeout(done, EVERY_MS));
    await refresh();
    if (!document.hidden) tell();
  }
}
document.addEventListener("visibilitychange", async () => { await refresh(); tell(); });
tell();
run();
