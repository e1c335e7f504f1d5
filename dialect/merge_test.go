package dialect

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/gormoutbox/outbox/engine"
)

func at(seconds int) time.Time { return time.Unix(int64(seconds), 0).UTC() }

func readyAt(id int64, inserted int) engine.Envelope {
	return engine.Envelope{ID: id, InsertedAt: at(inserted), ScheduledAt: at(inserted), Payload: []byte("12345")}
}

func dueAt(id int64, due, attempts int) engine.Envelope {
	return engine.Envelope{ID: id, InsertedAt: at(1), ScheduledAt: at(due), Attempts: attempts, Payload: []byte("12345")}
}

func TestMerge(t *testing.T) {
	t.Parallel()
	ready := []engine.Envelope{readyAt(10, 100), readyAt(11, 200), readyAt(12, 300)}
	tests := []struct {
		name     string
		due      []engine.Envelope
		limit    int
		maxBytes int
		want     string
		more     bool
	}{
		{"ready alone", nil, 9, 99, "10 11 12", false},
		{"delayed ones rank by their due time", []engine.Envelope{dueAt(1, 250, 0), dueAt(2, 150, 0), dueAt(3, 400, 0)}, 9, 99, "10 2 11 1 12 3", false},
		{"a delayed one of the same instant comes first", []engine.Envelope{dueAt(1, 200, 0)}, 9, 99, "10 1 11 12", false},
		{"a retry comes first", []engine.Envelope{dueAt(1, 250, 1), dueAt(2, 150, 0)}, 9, 99, "1 10 2 11 12", false},
		{"a revived one comes first", []engine.Envelope{dueAt(20, 0, 0), dueAt(3, 50, 2)}, 9, 99, "20 3 10 11 12", false},
		{"urgent ones by due time, then id", []engine.Envelope{dueAt(3, 60, 1), dueAt(2, 60, 1), dueAt(4, 50, 1)}, 9, 99, "4 2 3 10 11 12", false},
		{"the limit cuts", []engine.Envelope{dueAt(1, 150, 0)}, 3, 99, "10 1 11", true},
		{"a full list may go on", nil, 3, 99, "10 11 12", true},
		{"the bytes cut", []engine.Envelope{dueAt(1, 150, 0)}, 9, 14, "10 1", true},
		{"the bytes fit exactly", nil, 9, 15, "10 11 12", false},
		{"one message comes however large", nil, 9, 1, "10", true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			page, more := merge(test.due, ready, engine.Query{Limit: test.limit, MaxBytes: test.maxBytes})
			if got := idText(page); got != test.want || more != test.more {
				t.Errorf("merge = %s, more %v; want %s, more %v", got, more, test.want, test.more)
			}
		})
	}
}

func idText(page []engine.Envelope) string {
	var ids []string
	for _, e := range page {
		ids = append(ids, fmt.Sprint(e.ID))
	}
	return strings.Join(ids, " ")
}

func drawLists(t *rapid.T) (due, ready []engine.Envelope) {
	id := int64(0)
	clock := 10
	for range rapid.IntRange(0, 12).Draw(t, "messages") {
		id++
		clock += rapid.IntRange(0, 2).Draw(t, "pause")
		e := readyAt(id, clock)
		e.Payload = make([]byte, rapid.IntRange(0, 5).Draw(t, "bytes"))
		if rapid.Bool().Draw(t, "ready") {
			ready = append(ready, e)
			continue
		}
		e.Attempts = rapid.SampledFrom([]int{0, 0, 1, 3}).Draw(t, "attempts")
		e.ScheduledAt = at(rapid.SampledFrom([]int{0, clock, clock + 1, clock + 5}).Draw(t, "due"))
		due = append(due, e)
	}
	slices.SortFunc(due, func(a, b engine.Envelope) int {
		return cmp.Or(a.ScheduledAt.Compare(b.ScheduledAt), cmp.Compare(a.ID, b.ID))
	})
	return due, ready
}

func TestMergeProperties(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		due, ready := drawLists(t)
		all, _ := merge(due, ready, engine.Query{Limit: 1000, MaxBytes: 1000})
		if len(all) != len(due)+len(ready) {
			t.Fatalf("merged %d of %d messages", len(all), len(due)+len(ready))
		}
		checkOrder(t, all, ready)

		// Whatever the bounds, and however much of each list the database was
		// asked for, a page is the beginning of the same sequence.
		q := engine.Query{Limit: rapid.IntRange(1, 14).Draw(t, "limit"), MaxBytes: rapid.IntRange(1, 40).Draw(t, "max bytes")}
		page, more := merge(due[:min(len(due), q.Limit)], ready[:min(len(ready), q.Limit)], q)
		// Only urgent messages that were not asked for would have come earlier.
		if n := fitting(all, q); !urgentBeyond(due, q.Limit) && idText(page) != idText(all[:n]) {
			t.Fatalf("page = %s, want the first %d of %s", idText(page), n, idText(all))
		}
		if len(page) < len(all) && !more {
			t.Fatal("more is not set, though messages are left")
		}
		if more && len(all) < q.Limit && len(page) == len(all) {
			t.Fatal("more is set, though no limit was met")
		}
	})
}

// checkOrder compares every pair of neighbours and more.
func checkOrder(t *rapid.T, all, ready []engine.Envelope) {
	isReady := make(map[int64]bool)
	for _, e := range ready {
		isReady[e.ID] = true
	}
	for i := range all {
		for j := i + 1; j < len(all); j++ {
			a, b := &all[i], &all[j]
			urgentA, urgentB := !isReady[a.ID] && isUrgent(a), !isReady[b.ID] && isUrgent(b)
			var ok bool
			switch {
			case urgentA != urgentB:
				ok = urgentA
			case isReady[a.ID] && isReady[b.ID]:
				ok = a.ID < b.ID
			case isReady[a.ID]:
				ok = b.ScheduledAt.After(a.InsertedAt)
			case isReady[b.ID]:
				ok = urgentA || !a.ScheduledAt.After(b.InsertedAt)
			default:
				ok = a.ScheduledAt.Before(b.ScheduledAt) || a.ScheduledAt.Equal(b.ScheduledAt) && a.ID < b.ID
			}
			if !ok {
				t.Fatalf("%d comes before %d in %s", a.ID, b.ID, idText(all))
			}
		}
	}
}

// fitting is how many of the sequence the bounds allow.
func fitting(all []engine.Envelope, q engine.Query) int {
	bytes := 0
	for i := range all {
		bytes += len(all[i].Payload)
		if i == q.Limit || i > 0 && bytes > q.MaxBytes {
			return i
		}
	}
	return len(all)
}

func urgentBeyond(due []engine.Envelope, limit int) bool {
	for i := limit; i < len(due); i++ {
		if isUrgent(&due[i]) {
			return true
		}
	}
	return false
}
