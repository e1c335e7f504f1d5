package main

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// report gathers what is printed at the end.
type report struct {
	notes  []string
	series []series
	goals  []goal
}

// series is one quantity, measured once in each run.
type series struct {
	name string
	unit string
	runs []float64
}

// goal is what a figure should be.
type goal struct {
	what     string
	measured float64
	relation string // ">=" or "<="
	needed   float64
}

func (r *report) note(format string, args ...any) {
	r.notes = append(r.notes, fmt.Sprintf(format, args...))
}

func (r *report) add(list ...series) { r.series = append(r.series, list...) }

func (r *report) atLeast(what string, measured, needed float64) {
	r.goals = append(r.goals, goal{what, measured, ">=", needed})
}

func (r *report) atMost(what string, measured, needed float64) {
	r.goals = append(r.goals, goal{what, measured, "<=", needed})
}

func (s series) median() float64 {
	sorted := slices.Sorted(slices.Values(s.runs))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// spread is how far the runs lie apart, in parts of the median.
func (s series) spread() float64 {
	m := s.median()
	if m == 0 {
		return 0
	}
	return (slices.Max(s.runs) - slices.Min(s.runs)) / m
}

func (g goal) String() string {
	verdict := "short"
	if g.relation == ">=" && g.measured >= g.needed || g.relation == "<=" && g.measured <= g.needed {
		verdict = "ok"
	}
	return fmt.Sprintf("goal %s %.3f %s%s %s", g.what, g.measured, g.relation, strconv.FormatFloat(g.needed, 'f', -1, 64), verdict)
}

func (r *report) print(w io.Writer) error {
	for _, n := range r.notes {
		fmt.Fprintln(w, n)
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "figure\tunit\tmedian\tspread\truns")
	for _, s := range r.series {
		runs := make([]string, len(s.runs))
		for i, v := range s.runs {
			runs[i] = number(v)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%.0f%%\t%s\n", s.name, s.unit, number(s.median()), 100*s.spread(), strings.Join(runs, " "))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	for _, g := range r.goals {
		if _, err := fmt.Fprintln(w, g); err != nil {
			return err
		}
	}
	return nil
}

// number has about three digits that matter.
func number(v float64) string {
	if v >= 100 || v == float64(int64(v)) {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'f', 3, 64)
}
