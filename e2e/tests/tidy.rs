//! The house style that a machine can hold: file headers, sizes, names, lints, and nothing of one machine in the repo.
//! It reads the text of the checkout; what the compiler and clippy hold already is not repeated here.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

const FILE_LINES_MAX: usize = 1_000;
const FUNCTION_LINES_MAX: usize = 70;
const HEADER_LINES_MIN: usize = 2;
/// A file shorter than this may say it in one line.
const SMALL_FILE_LINES: usize = 250;
/// Folders that are not source.
const SKIPPED: &[&str] = &["target", ".git", "node_modules", "sealane-data", "corpus", "artifacts"];
const NAMES_BANNED: &[&str] = &["utils", "util", "common", "helper", "helpers", "manager", "misc"];

struct Source {
    path: String,
    text: String,
}

impl Source {
    fn is_test(&self) -> bool {
        let path = &self.path;
        path.contains("/tests/") || path.ends_with("_tests.rs") || path.ends_with("/tests.rs")
    }

    /// The lines outside of the test module, which by our custom is the last thing in a file.
    fn product_lines(&self) -> Vec<&str> {
        if self.path.contains("/tests/")
            || self.path.ends_with("_tests.rs")
            || self.path.ends_with("/tests.rs")
        {
            return Vec::new();
        }
        let lines: Vec<&str> = self.text.lines().collect();
        let end = lines.windows(2).position(|pair| {
            pair[0].trim() == "#[cfg(test)]"
                && pair[1].trim_start().starts_with("mod ")
                && pair[1].ends_with('{')
        });
        lines[..end.unwrap_or(lines.len())].to_vec()
    }
}

fn sources(extensions: &[&str]) -> Result<Vec<Source>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize()?;
    let mut files = Vec::new();
    walk(&root, &mut files)?;
    let mut found = Vec::new();
    for file in files {
        let wanted = file.extension().and_then(|is| is.to_str()).is_some_and(|is| extensions.contains(&is));
        if !wanted && !extensions.is_empty() {
            continue;
        }
        // What is no text has no style.
        let Ok(text) = fs::read_to_string(&file) else { continue };
        found.push(Source { path: file.strip_prefix(&root)?.to_string_lossy().into_owned(), text });
    }
    ensure!(!found.is_empty(), "nothing to read under {}", root.display());
    Ok(found)
}

fn walk(dir: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_dir() {
            if !SKIPPED.contains(&name.as_str()) {
                walk(&entry.path(), files)?;
            }
        } else if entry.file_type()?.is_file() {
            files.push(entry.path());
        }
    }
    Ok(())
}

fn judge(complaints: &[String]) -> Result<()> {
    ensure!(complaints.is_empty(), "\n{}", complaints.join("\n"));
    Ok(())
}

#[test]
fn every_rust_file_opens_by_saying_what_it_owns() -> Result<()> {
    let mut complaints = Vec::new();
    for source in sources(&["rs"])? {
        let header = source.text.lines().take_while(|line| line.starts_with("//!")).count();
        let long = source.text.lines().count() >= SMALL_FILE_LINES;
        let wanted = if source.is_test() || !long { 1 } else { HEADER_LINES_MIN };
        if header < wanted {
            complaints.push(format!("{}: a header of {header} lines", source.path));
        }
    }
    judge(&complaints)
}

#[test]
fn no_file_is_longer_than_a_thousand_lines() -> Result<()> {
    let mut complaints = Vec::new();
    for source in sources(&["rs"])? {
        let lines = source.product_lines().len();
        if lines > FILE_LINES_MAX {
            complaints.push(format!("{}: {lines} lines", source.path));
        }
    }
    judge(&complaints)
}

#[test]
fn no_function_is_longer_than_seventy_lines() -> Result<()> {
    let mut complaints = Vec::new();
    for source in sources(&["rs"])? {
        let lines = source.product_lines();
        for (at, line) in lines.iter().enumerate() {
            let Some(name) = function_name(line) else { continue };
            let indent = line.len() - line.trim_start().len();
            // Formatted code closes a function at the column where it began.
            let close = format!("{}}}", " ".repeat(indent));
            let length = lines[at..].iter().take_while(|line| **line != close).count() + 1;
            // The line that ends the signature stands at that column too, where it takes several.
            let head = match line.trim_end().ends_with('(') {
                true => lines[at + 1..].iter().find(|line| line.len() - line.trim_start().len() == indent),
                false => Some(line),
            };
            let is_declaration = head.is_some_and(|head| head.trim_end().ends_with([';', '}']));
            if !is_declaration && length > FUNCTION_LINES_MAX && lines[at..].iter().any(|line| *line == close)
            {
                complaints.push(format!("{}:{}: {name} has {length} lines", source.path, at + 1));
            }
        }
    }
    judge(&complaints)
}

/// The name of the function that begins on this line.
fn function_name(line: &str) -> Option<&str> {
    let mut words = line.trim_start();
    for prefix in ["pub(crate) ", "pub(super) ", "pub ", "const ", "async ", "unsafe "] {
        words = words.strip_prefix(prefix).unwrap_or(words);
    }
    let rest = words.strip_prefix("fn ")?;
    rest.split(['(', '<']).next()
}

#[test]
fn names_say_what_a_thing_is() -> Result<()> {
    let mut complaints = Vec::new();
    for source in sources(&["rs"])? {
        let stem = Path::new(&source.path).file_stem().map(|stem| stem.to_string_lossy().into_owned());
        if stem.is_some_and(|stem| NAMES_BANNED.contains(&stem.as_str())) {
            complaints.push(format!("{}: a file name that says nothing", source.path));
        }
        for (at, line) in source.product_lines().iter().enumerate() {
            // What a foreign trait calls its methods is not ours to name.
            let ours = line.trim_start().starts_with("pub") || !line.starts_with(' ');
            if ours && function_name(line).is_some_and(|name| name.starts_with("get_")) {
                complaints.push(format!("{}:{}: a getter is named by what it gives", source.path, at + 1));
            }
            let words: Vec<&str> = line.split_whitespace().collect();
            let kind = words.iter().position(|word| ["struct", "enum", "trait"].contains(word));
            let type_name =
                kind.filter(|at| *at <= 1).and_then(|at| words.get(at + 1)).copied().unwrap_or("");
            let type_name = type_name.trim_end_matches(['{', ';', '(']);
            if ["Manager", "Helper", "Util", "Utils"].iter().any(|end| type_name.ends_with(end)) {
                complaints.push(format!("{}:{}: {type_name} says nothing", source.path, at + 1));
            }
        }
    }
    judge(&complaints)
}

#[test]
fn every_crate_takes_the_lints_of_the_workspace() -> Result<()> {
    let mut complaints = Vec::new();
    for source in sources(&["toml"])? {
        let is_member =
            source.path.ends_with("Cargo.toml") && source.text.contains("version.workspace = true");
        if is_member && !source.text.contains("[lints]\nworkspace = true") {
            complaints.push(format!("{}: no [lints] workspace = true", source.path));
        }
    }
    judge(&complaints)
}

#[test]
fn nothing_is_left_for_later() -> Result<()> {
    let marks = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X"), concat!("for", " now")];
    let mut complaints = Vec::new();
    for source in sources(&["rs", "py", "go", "js", "java", "sh"])? {
        for (at, line) in source.text.lines().enumerate() {
            if let Some(mark) = marks.iter().find(|mark| line.contains(**mark)) {
                complaints.push(format!("{}:{}: {mark}", source.path, at + 1));
            }
        }
    }
    judge(&complaints)
}

#[test]
fn the_repo_knows_no_machine_but_the_readers_own() -> Result<()> {
    // Spelled in parts, or this file would be the first to complain about.
    let marks = [
        concat!("/wo", "rk/"),
        concat!("/ro", "ot/"),
        concat!("../sha", "red"),
        concat!("PLAN", ".md"),
        concat!("/ho", "me/"),
        concat!("registry.npm", "js.org"),
    ];
    let mut complaints = Vec::new();
    for source in sources(&[])? {
        for (at, line) in source.text.lines().enumerate() {
            if let Some(mark) = marks.iter().find(|mark| line.contains(**mark)) {
                complaints.push(format!("{}:{}: {mark}", source.path, at + 1));
            }
        }
    }
    judge(&complaints)
}

#[test]
fn every_test_that_the_document_of_cases_names_exists() -> Result<()> {
    let cases = sources(&["md"])?.into_iter().find(|source| source.path == "docs/CASES.md");
    let cases = cases.context("docs/CASES.md")?.text;
    let rows = cases.lines().filter(|line| line.starts_with('|'));
    let words = rows.flat_map(|row| row.split('`').skip(1).step_by(2));
    let named: Vec<&str> = words.filter(|word| word.split('_').count() > 3).collect();
    ensure!(named.len() > 30, "these cannot be all: {named:?}");
    let code = sources(&["rs"])?;
    let is_there = |name: &str| code.iter().any(|source| source.text.contains(&format!("fn {name}(")));
    let complaints = named.into_iter().filter(|name| !is_there(name)).map(|name| format!("no test {name}"));
    judge(&complaints.collect::<Vec<_>>())
}
