'use strict';
// The slash key focuses the search box.
document.addEventListener('keydown', (e) => {
  if (e.key === '/' && !e.ctrlKey && !e.metaKey && !e.altKey && !/^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName)) {
    e.preventDefault();
    document.querySelector('input[type=search]').focus();
  }
});
// The server renders each snapshot. It is shown when neither the keyboard nor a selection is inside, so that both keep
// their place. A text that is shown to its end stays there.
const live = document.getElementById('live');
if (live) {
  const events = new EventSource(live.dataset.events);
  const selection = getSelection();
  let latest = null;
  const show = () => {
    if (latest === null || live.contains(document.activeElement) ||
        (selection.type === 'Range' && live.contains(selection.anchorNode))) return;
    const places = Array.from(live.querySelectorAll('pre'), (p) =>
      p.scrollTop + p.clientHeight >= p.scrollHeight - 2 ? Infinity : p.scrollTop);
    live.innerHTML = latest;
    latest = null;
    live.querySelectorAll('pre').forEach((p, i) => { p.scrollTop = Math.min(places[i] ?? Infinity, p.scrollHeight); });
  };
  events.onmessage = (e) => {
    latest = JSON.parse(e.data);
    show();
    live.dataset.updates = Number(live.dataset.updates || 0) + 1;
  };
  events.addEventListener('over', () => {
    events.close();
    live.dataset.over = true;
  });
  live.addEventListener('focusout', () => setTimeout(show));
  document.addEventListener('selectionchange', show);
  addEventListener('pagehide', () => events.close());
}
// Buttons copy the text of the element that they name.
for (const b of document.querySelectorAll('button[data-copy]')) {
  b.hidden = false;
  b.addEventListener('click', async () => {
    await navigator.clipboard.writeText(document.getElementById(b.dataset.copy).textContent);
    b.textContent = 'copied';
  });
}
