package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"
)

// onceTimeout is how long serveOnce waits for its message.
const onceTimeout = 30 * time.Second

// serveOnce serves, places one order as any client would, writes the message
// that is delivered to w, and ends.
func serveOnce(ctx context.Context, listener net.Listener, a *api, w io.Writer) error {
	ctx, end := context.WithCancel(ctx)
	defer end()
	served := make(chan error, 1)
	go func() {
		defer end()
		served <- serve(ctx, listener, a)
	}()
	err := deliverOne(ctx, "http://"+listener.Addr().String(), a.journal, w)
	end()
	return errors.Join(err, <-served)
}

func deliverOne(ctx context.Context, url string, journal *Journal, w io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, onceTimeout)
	defer cancel()
	order, err := postOrder(ctx, url)
	if err != nil {
		return err
	}
	for {
		entries, _, changed := journal.Since(0)
		for _, e := range entries {
			if e.OrderID == order.ID && e.LatencyMS != nil {
				out := json.NewEncoder(w)
				out.SetIndent("", "  ")
				return out.Encode(e)
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("order %d was placed, and its message not delivered by this process: %w", order.ID, ctx.Err())
		}
	}
}

func postOrder(ctx context.Context, url string) (order Order, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("place an order: %w", err)
		}
	}()
	body := []byte(`{"customer": "Ada Lovelace", "item": "teapot", "quantity": 2}`)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/orders", bytes.NewReader(body))
	if err != nil {
		return Order{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return Order{}, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusCreated {
		text, _ := io.ReadAll(resp.Body)
		return Order{}, fmt.Errorf("%s: %s", resp.Status, text)
	}
	return order, json.NewDecoder(resp.Body).Decode(&order)
}
