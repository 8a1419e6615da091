//! Results for a person (aligned columns) or for a program (JSON): the same values in both.

use std::io::{self, Write as _};

use serde::Serialize;

use crate::args::OutputFormat;

/// Rows under headings, each column as wide as its widest cell.
pub struct Table {
    headings: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(headings: &[&'static str]) -> Table {
        Table { headings: headings.to_vec(), rows: Vec::new() }
    }

    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        assert_eq!(N, self.headings.len(), "a row has a cell per heading");
        self.rows.push(cells.to_vec());
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub fn text(&self) -> String {
        let cells = |index: usize| self.rows.iter().map(move |row| row[index].chars().count());
        let widths: Vec<usize> = self
            .headings
            .iter()
            .enumerate()
            .map(|(index, heading)| cells(index).chain([heading.len()]).max().unwrap_or(0))
            .collect();
        let line = |cells: Vec<&str>| {
            let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
            format!("{}\n", padded.collect::<Vec<_>>().join("  ").trim_end())
        };
        let mut text = line(self.headings.clone());
        for row in &self.rows {
            text.push_str(&line(row.iter().map(String::as_str).collect()));
        }
        text
    }
}

/// Prints `value` as JSON, or what `text` makes for a person.
pub fn show<T: Serialize>(format: OutputFormat, value: &T, text: impl FnOnce() -> String) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match format {
        OutputFormat::Json => {
            serde_json::to_writer_pretty(&mut out, value)?;
            out.write_all(b"\n")?;
        }
        OutputFormat::Text => out.write_all(text().as_bytes())?,
    }
    out.flush()
}

/// A number that may not be known.
pub fn known<T: ToString>(value: Option<T>) -> String {
    value.map_or("unknown".to_owned(), |value| value.to_string())
}

/// -1 stands for "not known" on the wire.
pub fn non_negative(value: i64) -> Option<i64> {
    (value >= 0).then_some(value)
}

/// Bytes in the largest unit that keeps the number above 1.
pub fn bytes(count: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut size = count as f64;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < units.len() {
        size /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{size:.1} {}", units[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_lines_have_no_trailing_blanks() {
        let mut table = Table::new(&["NAME", "PARTITIONS"]);
        table.row(["orders".to_owned(), "12".to_owned()]);
        table.row(["a".to_owned(), String::new()]);
        assert_eq!(table.text(), "NAME    PARTITIONS\norders  12\na\n");
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(5 << 30), "5.0 GiB");
    }
}
