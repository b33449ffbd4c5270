// The part of a page that changes while work runs is asked for again until the server says it is over.
"use strict";

const PAUSE = 1000;

async function look() {
  const shown = document.querySelector("#live[data-live]");
  if (!shown) return;
  try {
    const answer = await fetch(location.pathname, { redirect: "error", cache: "no-store" });
    if (answer.ok) {
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.querySelector("#live");
      if (fresh && fresh.outerHTML !== shown.outerHTML) shown.replaceWith(document.adoptNode(fresh));
    } else if (answer.status !== 429 && answer.status !== 503) {
      return;
    }
  } catch {
    // The server is away; it may come back.
  }
  setTimeout(look, PAUSE);
}

setTimeout(look, PAUSE);
