// @ts-check
/** A button that copies the text of an element. */
import { h, setText } from "./dom.js";

/** @param {Element} from */
export function copyButton(from) {
  const button = h("button", { type: "button", class: "quiet", click: () => void copyText(from, button) }, "Copy");
  return button;
}

/** @param {Element} from @param {Element} button */
async function copyText(from, button) {
  try {
    await navigator.clipboard.writeText(from.textContent ?? "");
    setText(button, "Copied");
  } catch {
    // Without https, or without the permission: the user copies what is selected.
    getSelection()?.selectAllChildren(from);
    setText(button, "Selected");
  }
}
