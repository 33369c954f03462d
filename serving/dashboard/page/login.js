const form = document.getElementById("form");
const problem = document.getElementById("problem");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  problem.textContent = "";
  const key = document.getElementById("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) {
    problem.textContent = "A key has printable ASCII letters only.";
    return;
  }
  try {
    // In a header, as every client sends it: never in a URL, which logs keep.
    const answer = await fetch("dashboard/login", { method: "POST", headers: { Authorization: `Bearer ${key}` } });
    if (answer.ok) location.reload();
    else problem.textContent = (await answer.json()).error.message;
  } catch {
    problem.textContent = "The server cannot be reached.";
  }
});
