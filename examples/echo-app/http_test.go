package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/gormoutbox/outbox"
)

// nextEntry reads an entry from a stream of events.
func nextEntry(t *testing.T, stream *bufio.Scanner) Entry {
	t.Helper()
	for stream.Scan() {
		data, ok := strings.CutPrefix(stream.Text(), "data: ")
		if !ok {
			continue
		}
		var e Entry
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			t.Fatal(err)
		}
		return e
	}
	t.Fatalf("the stream ended: %v", stream.Err())
	return Entry{}
}

// An order is placed and cancelled, and both messages come through, in order,
// to somebody who watches and to somebody who comes later.
func TestOrderIsAnnounced(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, d database) {
		a := newApp(t, d)
		url := a.serve(t)
		a.relay(t)
		live := watch(t, url)

		resp := send(t, http.MethodPost, url+"/orders", validOrder)
		var order Order
		if err := json.Unmarshal([]byte(resp.body), &order); err != nil {
			t.Fatal(err)
		}
		if at := resp.header.Get("Location"); resp.status != http.StatusCreated || order.ID != 1 || at != "/orders/1" {
			t.Errorf("answered %d, order %+v at %q", resp.status, order, at)
		}
		if got := send(t, http.MethodDelete, url+"/orders/1", ""); got.status != http.StatusNoContent {
			t.Errorf("the order was not cancelled: %d", got.status)
		}

		var first, second Entry
		for second.LatencyMS == nil {
			switch e := nextEntry(t, live); e.Type {
			case placed:
				first = e
			case cancelled:
				second = e
			}
		}
		if string(first.Payload) != `{"order_id":1,"customer":"Grace Hopper","item":"kettle","quantity":3}` {
			t.Errorf("the payload is %s", first.Payload)
		}
		if first.DeliveredAt.After(second.DeliveredAt) || first.DedupID == second.DedupID || first.GroupKey != "1" {
			t.Errorf("delivered %+v, then %+v", first, second)
		}
		later := watch(t, url)
		if e := nextEntry(t, later); e.DedupID != first.DedupID || e.LatencyMS == nil {
			t.Errorf("the journal begins with %+v", e)
		}
		if got := send(t, http.MethodGet, url+"/orders/1", ""); !strings.Contains(got.body, `"cancelled_at"`) {
			t.Errorf("the order is %s", got.body)
		}
	})
}

// What a client does wrong, it is told, and nothing is stored.
func TestBadRequests(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("é", maxText+1)
	for _, test := range []struct {
		method, path, body string
		status             int
		why                string
	}{
		{"POST", "/orders", ``, 400, "the body is empty"},
		{"POST", "/orders", `{"customer"`, 400, "not JSON"},
		{"POST", "/orders", `customer=Ada`, 400, "not JSON"},
		{"POST", "/orders", `[]`, 400, "the body is a JSON array"},
		{"POST", "/orders", `null`, 400, "customer is missing; item is missing; quantity is 0"},
		{"POST", "/orders", validOrder + validOrder, 400, "after the JSON object"},
		{"POST", "/orders", `{"prize": 1}`, 400, `no field "prize"`},
		{"POST", "/orders", `{"customer": 1}`, 400, "customer is a JSON number; it must be a string"},
		{"POST", "/orders", `{"quantity": 1.5}`, 400, "it must be a whole number"},
		{"POST", "/orders", `{"customer": " ", "item": "cup", "quantity": 1}`, 400, "customer is missing"},
		{"POST", "/orders", `{"customer": "Ada", "item": "a\u0000b", "quantity": 1}`, 400, "item has a control character"},
		{"POST", "/orders", `{"customer": "` + long + `", "item": "cup", "quantity": 1}`, 400, "customer has 101 characters"},
		{"POST", "/orders", `{"customer": "Ada", "item": "cup", "quantity": 1001}`, 400, "quantity is 1001"},
		{"POST", "/orders", strings.Repeat(" ", maxBody+1), 413, "larger than 16384 bytes"},
		{"GET", "/orders/1", ``, 404, "no such order"},
		{"GET", "/orders/one", ``, 400, `"one" is not the id`},
		{"DELETE", "/orders/99999999999999999999", ``, 400, "is not the id"},
		{"DELETE", "/orders/1", ``, 404, "no such order"},
		{"GET", "/nothing", ``, 404, "there is no /nothing"},
		{"PUT", "/orders", validOrder, 405, "not with PUT"},
	} {
		t.Run(fmt.Sprint(test.method, test.path, test.why), func(t *testing.T) {
			t.Parallel()
			a := newApp(t, sqliteFile(t))
			wantError(t, send(t, test.method, a.serve(t)+test.path, test.body), test.status, test.why)
			a.wantStored(t, 0, 0)
		})
	}
}

func TestHealth(t *testing.T) {
	t.Parallel()
	a := newApp(t, sqliteFile(t))
	url := a.serve(t) + "/healthz"
	if got := send(t, http.MethodGet, url, ""); got.status != http.StatusOK {
		t.Errorf("answered %d", got.status)
	}
	if err := a.db.Migrator().DropTable(outbox.DefaultTable); err != nil {
		t.Fatal(err)
	}
	wantError(t, send(t, http.MethodGet, url, ""), http.StatusServiceUnavailable, "not ready")
}

// The page brings everything with it.
func TestPage(t *testing.T) {
	t.Parallel()
	a := newApp(t, sqliteFile(t))
	got := send(t, http.MethodGet, a.serve(t), "")
	if got.status != http.StatusOK || !strings.HasPrefix(got.header.Get("Content-Type"), "text/html") || !strings.Contains(got.body, `new EventSource("/events")`) {
		t.Errorf("answered %d, %s, %s", got.status, got.header, got.body)
	}
	if strings.Contains(got.body, `src="`) || strings.Contains(got.body, `rel="stylesheet"`) || !strings.HasPrefix(got.header.Get("Content-Security-Policy"), "default-src 'none'") {
		t.Error("the page loads what it does not bring")
	}
}
