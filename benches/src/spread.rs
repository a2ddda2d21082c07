//! One figure measured several times.

/// The middle, the least and the most of several measurements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// The mean.
    pub mean: f64,
    /// The median.
    pub median: f64,
    /// The least.
    pub least: f64,
    /// The most.
    pub most: f64,
}

impl Spread {
    /// Of these values; `None` of none.
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (least, most) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
        Some(Self { mean: sorted.iter().sum::<f64>() / sorted.len() as f64, median, least, most })
    }

    /// Median, least and most for a table; a dash for nothing.
    pub fn show(spread: Option<&Self>, digits: usize) -> String {
        spread.map_or_else(
            || "-".to_owned(),
            |spread| {
                format!("{:.digits$} ({:.digits$}-{:.digits$})", spread.median, spread.least, spread.most)
            },
        )
    }

    /// The median alone for a table; a dash for nothing.
    pub fn show_middle(spread: Option<&Self>, digits: usize) -> String {
        spread.map_or_else(|| "-".to_owned(), |spread| format!("{:.digits$}", spread.median))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_lies_between_the_two_in_the_middle() {
        for (values, median) in
            [(vec![3.0, 1.0, 2.0], 2.0), (vec![4.0, 1.0, 2.0, 3.0], 2.5), (vec![7.0], 7.0)]
        {
            let spread = Spread::of(&values).expect("values");
            assert_eq!(spread.median, median);
            assert!(spread.least <= spread.mean && spread.mean <= spread.most);
        }
        assert_eq!(Spread::of(&[]), None);
    }
}
