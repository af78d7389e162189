// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Metric reads a metric without labels from a server's metrics at url.
func Metric(ctx context.Context, url, name string) (float64, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, err
	}
	client := http.Client{Timeout: time.Minute}
	response, err := client.Do(request)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		if rest, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			return strconv.ParseFloat(rest, 64)
		}
	}
	return 0, errors.Join(fmt.Errorf("%s has no metric %s", url, name), lines.Err())
}
