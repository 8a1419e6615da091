//! The fenced blocks of a document: what it tells a person to type is what a test runs.

/// The blocks whose info string is `info`, joined.
pub fn blocks(document: &str, info: &str) -> String {
    let (mut text, mut inside) = (String::new(), false);
    for line in document.lines() {
        match line.strip_prefix("```") {
            Some(_) if inside => inside = false,
            Some(found) => inside = found == info,
            None if inside => text += &format!("{line}\n"),
            None => {}
        }
    }
    text
}
