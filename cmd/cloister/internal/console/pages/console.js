'use strict';
// The slash key focuses the search box.
document.addEventListener('keydown', (e) => {
  if (e.key === '/' && !e.ctrlKey && !e.metaKey && !e.altKey && !/^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName)) {
    e.preventDefault();
    document.querySelector('input[type=search]').focus();
  }
});
// The server renders each snapshot. One is skipped while the keyboard is inside, so that it keeps its place.
const live = document.getElementById('live');
if (live) {
  const events = new EventSource(live.dataset.events);
  events.onmessage = (e) => {
    if (!live.contains(document.activeElement)) live.innerHTML = JSON.parse(e.data);
    live.dataset.updates = Number(live.dataset.updates || 0) + 1;
  };
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
