// All talk with the server. The token comes with the address that was opened; it is taken out of the address bar, and
// kept for this tab only, so that loading the page anew keeps the buttons.

const KEPT = "vla-stream-token";

function findToken() {
  const address = new URL(location.href);
  const given = address.searchParams.get("token");
  if (given) {
    sessionStorage.setItem(KEPT, given);
    address.searchParams.delete("token");
    history.replaceState(null, "", address);
  }
  return given ?? sessionStorage.getItem(KEPT);
}

export const token = findToken();
const headers = token ? { "X-Token": token } : {};

// Throws Error with the server's words.
async function answer(address, options) {
  const response = await fetch(address, { ...options, headers, cache: "no-store", signal: AbortSignal.timeout(15000) });
  if (!response.ok) throw new Error((await response.text()).trim() || `the dashboard answered ${response.status}`);
  return response.json();
}

export const getJson = (address) => answer(address, {});
export const press = (button) => answer(`press/${button}`, { method: "POST" });
